"""For authors of backends: the contract as a test class."""

from prefixstore.testing.contract import BackendContract, PersistentBackendContract

__all__ = ["BackendContract", "PersistentBackendContract"]

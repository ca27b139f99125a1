"""For authors of backends: the contract as a test class."""

from prefixstore.testing.backend_contract import BackendContract
from prefixstore.testing.persistent import PersistentBackendContract

__all__ = ["BackendContract", "PersistentBackendContract"]

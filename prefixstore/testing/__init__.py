"""For authors of backends: the contract as a test class, and backends that misbehave on purpose."""

from prefixstore.testing.contract import BackendContract, PersistentBackendContract
from prefixstore.testing.faults import FaultyBackend, Operation, SlowBackend

__all__ = ["BackendContract", "FaultyBackend", "Operation", "PersistentBackendContract", "SlowBackend"]

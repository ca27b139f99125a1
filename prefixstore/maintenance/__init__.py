"""A location without a model: inspect, repair, move, verify, measure."""

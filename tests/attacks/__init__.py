"""Attacks: what prefixstore has to survive. A bounded form runs in `make test`, a long one in `make torture`."""

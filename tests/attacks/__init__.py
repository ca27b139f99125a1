"""Attacks: what prefixstore has to survive. `make attack` runs a bounded form, `make torture` a long one."""

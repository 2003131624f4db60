"""The side that owns environments: carries out commands, writes rows."""

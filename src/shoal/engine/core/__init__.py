"""Pure decisions: values in, values out. Nothing here waits, logs or reads a clock."""

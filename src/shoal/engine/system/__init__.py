"""One operating-system facility a file. Nothing here knows environments or arrays."""

"""The command line, one file a verb, and the only reader of the environment and of argv."""

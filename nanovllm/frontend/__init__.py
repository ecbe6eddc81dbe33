"""Between a user's threads, event loops and processes, and the one thread that runs an engine's steps."""

"""Long measurements that are not part of the installed package. Run them from the repository root."""

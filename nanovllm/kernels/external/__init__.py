"""Libraries that provide ops, where they are installed. Importing these modules imports none of the libraries."""

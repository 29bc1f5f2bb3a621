"""The commands: each module adds its own to the command line, and says what calls them."""

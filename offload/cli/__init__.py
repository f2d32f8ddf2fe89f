"""The command `offload`: one file a command, registered in main.py."""

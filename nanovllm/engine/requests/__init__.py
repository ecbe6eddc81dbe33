"""What an engine is given and gives back: prompts, checked requests, and the texts of their outputs.

Nothing here needs the model or its device. A server's front ends are processes of their own that use this room alone.
"""

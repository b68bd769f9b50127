"""Torch names and behavior that are private or differ between versions, one file per subject.

Each name states the versions it was checked on, so that a new torch release affects only this folder. Everything may
import from here; nothing here imports another room.
"""

"""Names and behavior of torch that are private or differ between its versions, one file a subject.

Each name says the versions it was checked on: a new release of torch is a matter of this folder.
Everything may import from here; nothing here imports another room.
"""

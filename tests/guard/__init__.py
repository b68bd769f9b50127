"""Runs of all compiled C between pages that nobody may touch, over odd and empty sizes: ``make guard``.

memory.py: tensors, and what C itself allocates, that end or begin at such a page. cases_*.py: what is called, and what
it is compared with. run.py: runs cases in children, which may die, and says which kernels no case has called.
"""

"""Trainers that people use: Lightning, transformers' Trainer, accelerate.

Each file is for one package and imports it; without the package its import raises one error that names what to install.
Imports everything below; nothing imports from here.
"""

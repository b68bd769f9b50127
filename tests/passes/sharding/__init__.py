"""Tests of passes over joint graphs whose parameters are sharded."""

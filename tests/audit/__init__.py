"""Tests of ``amp-graph audit``: scripts with planted faults and their corrected twins, and clean scripts."""

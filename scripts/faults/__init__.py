"""Faults that are planted into real servers, and by which words a run names them."""

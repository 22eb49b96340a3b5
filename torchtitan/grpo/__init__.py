"""GRPO for torchtitan. Import light on purpose: inference servers import the weight receiver from here."""

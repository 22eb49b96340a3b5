"""Tasksets of `verifiers` for tests: sums (one turn), lookup (a tool), guess (several turns), broken (fails)."""

"""State that leaves the process: published per-rank state, trees of tensors, copies between replicas."""

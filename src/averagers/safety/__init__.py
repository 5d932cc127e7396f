"""What keeps ranks together: agreement before a round, and one clear error after a failed one."""

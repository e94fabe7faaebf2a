"""``rocm-dp validate``: is every transport right on this machine, for the counts that have broken others."""

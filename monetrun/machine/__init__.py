"""What the machine offers: devices and their free memory, the cgroup's limit, the cache on disk; no torch."""

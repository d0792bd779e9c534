"""The machine: devices and their free memory, the cgroup's limit, the cache on disk. No torch."""

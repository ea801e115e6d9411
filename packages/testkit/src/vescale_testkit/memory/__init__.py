"""Where the bytes went: what the allocator was asked for, and which storages are alive."""

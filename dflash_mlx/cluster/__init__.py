"""One target on several machines: rank 0 decides, the others do on their shards what it did."""

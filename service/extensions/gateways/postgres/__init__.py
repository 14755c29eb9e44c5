"""What of this server is in a PostgreSQL database: the shards with their owners, and their journals."""

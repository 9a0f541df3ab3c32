"""What the servers of one database agree on: leases of policies, news, the order of calls."""

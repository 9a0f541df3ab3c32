"""Agreement between the servers of one database: leases of policies, notifications, call order."""

"""What a number of rollouts a day needs: arithmetic, queues, and bytes of a database."""

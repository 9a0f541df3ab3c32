"""The page that the server serves at its own address: files, their facts as JSON, the login."""

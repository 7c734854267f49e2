"""What `/metrics` shows: what this process counted, how it stands, and how the runs stand in the database."""

"""Workers: registration, heartbeats, acks, failures and capacity tickets."""

"""What crosses the network, shared by server and client: JSON models, Arrow columns, problem codes."""

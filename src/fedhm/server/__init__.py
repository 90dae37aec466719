"""What happens to a round's tasks and updates at the server."""

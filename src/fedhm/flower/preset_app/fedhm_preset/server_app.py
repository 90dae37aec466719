"""What runs beside the SuperLink."""

from fedhm.flower.server import named_server_app

app = named_server_app()

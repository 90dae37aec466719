"""The ServerApp: it runs beside the SuperLink."""

from fedhm.flower.server import config_server_app

app = config_server_app()

"""The ServerApp: it runs beside the SuperLink."""

from fedhm.flower import server_app
from mixed_fleet.task import CLASSES, build_model, test_data

app = server_app(build_model, test_data, CLASSES)

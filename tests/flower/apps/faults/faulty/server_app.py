"""An honest server."""

from faulty.task import CLASSES, build_model, test_data
from fedhm.flower import server_app

app = server_app(build_model, test_data, CLASSES)

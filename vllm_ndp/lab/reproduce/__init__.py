"""Published figures and ours, row by row, with the assumptions of each."""

from vllm_ndp.lab.reproduce.cxl_expert import reproduce_cxl_expert
from vllm_ndp.lab.reproduce.hobbit import reproduce_hobbit
from vllm_ndp.lab.reproduce.locality import reproduce_locality
from vllm_ndp.lab.reproduce.moepic import reproduce_moepic
from vllm_ndp.lab.reproduce.monde import reproduce_monde
from vllm_ndp.lab.reproduce.paper import reproduce_paper
from vllm_ndp.lab.reproduce.row import Reproduction, Row

__all__ = [
    "Reproduction",
    "Row",
    "reproduce_cxl_expert",
    "reproduce_hobbit",
    "reproduce_locality",
    "reproduce_moepic",
    "reproduce_monde",
    "reproduce_paper",
]

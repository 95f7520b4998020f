"""VATP_H2O: H2O with the attention weighted by the norm of the value that it brings; the first tokens, whose values are small, stay.

Made by kvdsl 0.1.0 from vatp_h2o.kv (53b6ebffc25c). Do not edit: run `kvdsl compile vatp_h2o.kv`.
"""

from .cache import VATP_H2OCache

__all__ = ["VATP_H2OCache"]

"""Layouts on which numbers must be those of one process. Arguments of `Layout`; what tp * cp * pp leave over is dp."""

from __future__ import annotations

Sizes = dict[str, int]

ONE: Sizes = dict(world_size=1)
LAYOUTS: dict[str, Sizes] = {
    "tp2": dict(world_size=2, tp_size=2),
    "pp2": dict(world_size=2, pp_size=2),
    "vpp2_pp2": dict(world_size=2, pp_size=2, vpp_size=2),
    "uneven_pp2": dict(world_size=2, pp_size=2, first_stage_layers=1),
    "cp2": dict(world_size=2, cp_size=2),
    "cp4": dict(world_size=4, cp_size=4),
    "dp2": dict(world_size=2),
    "tp2_pp2": dict(world_size=4, tp_size=2, pp_size=2),
    "tp2_dp2": dict(world_size=4, tp_size=2),
    "tp2_cp2": dict(world_size=4, tp_size=2, cp_size=2),
    "pp2_dp2": dict(world_size=4, pp_size=2),
    "cp2_dp2": dict(world_size=4, cp_size=2),
    "tp2_pp2_cp2": dict(world_size=8, tp_size=2, pp_size=2, cp_size=2),
}
MIXTURE_LAYOUTS: dict[str, Sizes] = {
    "ep2": dict(world_size=2, ep_size=2),
    "tp2_etp2": dict(world_size=2, tp_size=2, etp_size=2),
    "tp2_ep2": dict(world_size=4, tp_size=2, ep_size=2, etp_size=2),
    "tp2_ep2_etp1": dict(world_size=2, tp_size=2, ep_size=2),
    "ep2_cp2": dict(world_size=2, cp_size=2, ep_size=2),
    "ep2_pp2": dict(world_size=4, pp_size=2, ep_size=2),
}

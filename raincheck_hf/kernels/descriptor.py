"""What the kernels of one pass read on the device: lengths and addresses, as int64.

A captured graph fixes its launches' arguments. So that one graph serves every conversation, the
kernels take what differs between passes from a small tensor, which is rewritten before each replay:
one header a pass, and one record a layer.

Rows of a pass: ``capacity`` rows for a chunk (P or D), of which the first CHUNK are in use, and
behind them the decode row, at index ``capacity``, in use where TOKEN is 1. Chunk rows go to slots
PREFIX, PREFIX + 1, ...; the decode row goes to slot END. Unused rows write nothing to the
conversation.
"""

from __future__ import annotations

import triton.language as tl

# Header.
PREFIX = tl.constexpr(0)  # slots visible before the reserved gap, before this pass
CHUNK = tl.constexpr(1)  # chunk rows in use
ANSWER = tl.constexpr(2)  # slot of y_1
END = tl.constexpr(3)  # slot of the decode row
TOKEN = tl.constexpr(4)  # 1 with a decode row, else 0
RECORD = tl.constexpr(5)  # 1 if the decode row's factors are kept for later joins, else 0
LEAD = tl.constexpr(6)  # lead tokens recorded before this pass, 0 to 3
MAPPED = tl.constexpr(7)  # 1 if there is a suffix map before this pass, else 0 (it is the identity)
TOKEN_ID = tl.constexpr(9)  # address of the decode row's token id, int64
POSITION = tl.constexpr(10)  # the decode row's M-RoPE position, three entries
HEADER = tl.constexpr(16)  # entries

# Record of an attention layer.
KEYS = tl.constexpr(0)  # address of [H, slots, dim]
VALUES = tl.constexpr(1)  # address of [H, slots, dim]
STRIDE = tl.constexpr(2)  # elements from one head to the next: slots * dim

# Record of a recurrent layer: addresses, read (IN) and written (OUT), never the same memory.
# States are fp32 [HV, K, V], maps fp32 [HV, K, K], histories [C, W - 1] in the model's dtype.
PREFIX_STATE_IN = tl.constexpr(0)
PREFIX_STATE_OUT = tl.constexpr(1)
PREFIX_HISTORY_IN = tl.constexpr(2)
PREFIX_HISTORY_OUT = tl.constexpr(3)
LIVE_STATE_IN = tl.constexpr(4)
LIVE_STATE_OUT = tl.constexpr(5)
LIVE_HISTORY_IN = tl.constexpr(6)
LIVE_HISTORY_OUT = tl.constexpr(7)
LEAD_STATE_IN = tl.constexpr(8)
LEAD_STATE_OUT = tl.constexpr(9)
PHI_IN = tl.constexpr(10)
PHI_OUT = tl.constexpr(11)
# Factors of the lead tokens: inputs [C, W - 1] in the model's dtype, one column a token, and
# g and beta, fp32 [W - 1, HV], one row a token; the first LEAD are in use.
LEAD_INPUTS_IN = tl.constexpr(12)
LEAD_INPUTS_OUT = tl.constexpr(13)
LEAD_G_IN = tl.constexpr(14)
LEAD_G_OUT = tl.constexpr(15)
LEAD_BETA_IN = tl.constexpr(16)
LEAD_BETA_OUT = tl.constexpr(17)

RECORD_SIZE = tl.constexpr(20)  # entries of a layer's record, both kinds

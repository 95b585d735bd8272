"""Two turns of a conversation on two byte engines, the way of a hand-over from D back to P.

`two_turns` runs them: P computes the first prompt, D loads it and generates, and its `request_finished` may
keep D's blocks and return kv_transfer_params. P's next request has these, and a prompt that begins with the
first one and D's answer. Each load is compared as in every transfer of the byte rig; what P loads may have
been computed by either engine.
"""

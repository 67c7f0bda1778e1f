"""The engines. Those other than ``direct`` convert a Ray Dataset of requests to a Ray Dataset of responses.

row        {batch_id: string, segment: int64, epoch: int64, row: int64, line: int64, custom_id: string, twins: string}
requests   row + {url: string, body: binary, tokens: float64}
responses  row + {status_code: int64, response_body: binary}

``twins`` is a JSON list.
"""

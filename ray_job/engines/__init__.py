"""The engines. Each converts a Ray Dataset of requests to a Ray Dataset of responses.

requests   {line: int64, custom_id: string, url: string, body: binary}
responses  {line: int64, custom_id: string, status_code: int64, response_body: binary}
"""

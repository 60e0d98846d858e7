#!/usr/bin/env bash
# A ditile server by curl: an image, an edit, a stream, a video, and what the server says of itself.
#
#     ditile serve --model shapes-flux --pipefusion 2
#     examples/serve_curl.sh [http://127.0.0.1:8000]
#
# It needs curl and jq. The key is that of DITILE_API_KEY, if the server asks for one.
set -euo pipefail
server=${1:-http://127.0.0.1:8000}
key=(-H "authorization: Bearer ${DITILE_API_KEY:-none}")
json=(-H "content-type: application/json")
call() { curl --silent --show-error --fail-with-body "${key[@]}" "$@"; }

# An answer of any status is one; /health is 503 while the ranks load the model.
if ! curl --silent --output /dev/null "$server/health"; then
  echo "serve_curl.sh: no server answers at $server; start ditile serve, or give its address" >&2
  exit 1
fi
call "$server/health" | jq -c .
model=$(call "$server/v1/models" | jq -r '.data[0].id')
call "$server/v1/plan" | jq -c '{model, plan}'

if [[ $model == *wan* ]]; then
  # A video is a job: it is asked for, watched and fetched.
  id=$(call "$server/v1/videos" "${json[@]}" \
    -d '{"prompt": "a large red circle moves from left to right on a gray background", "seed": 7}' | jq -r .id)
  while status=$(call "$server/v1/videos/$id" | jq -r .status) && [[ $status == queued || $status == in_progress ]]; do
    sleep 0.5
  done
  call "$server/v1/videos/$id" | jq -c '{id, status, size, seconds, seed, error}'
  call "$server/v1/videos/$id/content" -o curl-video.mp4
  call -X DELETE "$server/v1/videos/$id" | jq -c .
  exit
fi

prompt="a large red circle on the left on a gray background"
call "$server/v1/images/generations" "${json[@]}" -d "{\"prompt\": \"$prompt\", \"seed\": 7}" > curl-answer.json
jq -c '{size, seed, inference_time_s, warnings}' curl-answer.json
jq -r '.data[0].b64_json' curl-answer.json | base64 --decode > curl-image.png

# The same as an address, which needs no key.
url=$(call "$server/v1/images/generations" "${json[@]}" \
  -d "{\"prompt\": \"$prompt\", \"seed\": 7, \"response_format\": \"url\"}" | jq -r '.data[0].url')
curl --silent --fail "$url" | cmp - curl-image.png

# Edits are forms. Only the types of the events of a stream are shown.
call "$server/v1/images/edits" -F image=@curl-image.png -F seed=7 -F strength=0.8 \
  -F "prompt=a large blue square on the left on a gray background" | jq -c '{size, seed}'
call --no-buffer "$server/v1/images/generations" "${json[@]}" \
  -d "{\"prompt\": \"$prompt\", \"seed\": 7, \"stream\": true, \"partial_images\": 2}" | grep '^event:'

# An error is one line that says what would work.
curl --silent "${key[@]}" "${json[@]}" "$server/v1/images/generations" -d '{"prompt": "a circle", "size": "100x100"}' |
  jq -r '.error.message'

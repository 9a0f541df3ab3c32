#!/usr/bin/env bash
# Plain curl, tagged by headers; Python reads the answers.
set -euo pipefail
base_url=$1 prefix=$2
if (($# > 2)); then
  for prefix in "${@:2}"; do bash "$0" "$base_url" "$prefix"; done
  exit
fi
ask() {  # feature, body, step
  curl --silent --no-buffer "$base_url/chat/completions" -H 'Content-Type: application/json' \
    -H "x-art-trajectory-id: $prefix-$1" -H 'x-art-node: agent' -H "x-art-step: ${3:-0}" -d "$2"
}
read_json() { python3 -c "import json,sys; d = json.load(sys.stdin); print(json.dumps($1))"; }

numbers='{"a": {"type": "integer"}, "b": {"type": "integer"}}'
parameters='{"type": "object", "properties": '$numbers', "required": ["a", "b"]}'
tools='[{"type": "function", "function": {"name": "add", "parameters": '$parameters'}}]'
user='{"role": "user", "content": "⟦<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 2, \"b\": 3}}\n</tool_call>¦The sum is ⁑4.⟧"}'
first=$(ask tools '{"model": "tiny", "tools": '"$tools"', "messages": ['"$user"']}' |
  read_json 'd["choices"][0]["message"]')
id=$(read_json 'd["tool_calls"][0]["id"]' <<<"$first")
call=$(read_json 'd["tool_calls"][0]["function"]' <<<"$first")
result='{"role": "tool", "tool_call_id": '$id', "content": "5"}'
said=$(ask tools '{"model": "tiny", "tools": '"$tools"', "stream": true,
  "stream_options": {"include_usage": true},
  "messages": ['"$user, $first, $result"']}' 1 | python3 -c '
import json, sys
events = [line[6:] for line in sys.stdin if line.startswith("data: ")]
assert events[-1].strip() == "[DONE]"
chunks = [json.loads(event) for event in events[:-1]]
text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
print(json.dumps([text, chunks[-1]["usage"]["completion_tokens"] > 0]))')

properties='{"name": {"type": "string"}, "age": {"type": "integer"}}'
schema='{"type": "object", "properties": '$properties', "required": ["name", "age"], "additionalProperties": false}'
person=$(ask schema '{"model": "tiny", "messages": [{"role": "user", "content": "The name is '"'Bob'"', age 7."}],
  "response_format": {"type": "json_schema", "json_schema": {"name": "Person", "schema": '"$schema"'}}}' |
  read_json 'json.loads(d["choices"][0]["message"]["content"])')
say() { echo '{"model": "tiny", "messages": [{"role": "user", "content": "⟦'"$1"'⟧"}]'"${2:-}"'}'; }
logprobs=$(ask logprobs "$(say Hello. ', "logprobs": true, "top_logprobs": 2')" | read_json \
  '(lambda e: [len(e) == d["usage"]["completion_tokens"], all(x["logprob"] <= 0 and len(x["top_logprobs"]) == 2 for x in e)])(d["choices"][0]["logprobs"]["content"])')
n=$(ask n "$(say Twice. ', "n": 2')" | read_json '[[c["index"], c["message"]["content"]] for c in d["choices"]]')
stop=$(ask stop "$(say 'one two three' ', "stop": ["three"], "seed": 7')" |
  read_json '[d["choices"][0]["message"]["content"].strip(), d["choices"][0]["finish_reason"]]')
refusal=$(mktemp)
status=$(curl --silent --output "$refusal" --write-out '%{http_code}' "$base_url/chat/completions" \
  -H 'Content-Type: application/json' -d '{"model": "nobody", "messages": [{"role": "user", "content": "hi"}]}')
code=$(read_json 'd["error"]["code"]' <"$refusal")
rm "$refusal"
python3 - "$call" "$said" "$person" "$logprobs" "$n" "$stop" "[$status, $code]" <<'PYTHON'
import json, sys
call, said, person, logprobs, n, stop, error = map(json.loads, sys.argv[1:])
tools = [call["name"], json.loads(call["arguments"]), *said]
print(json.dumps({"client": "curl", "tools": tools, "schema": person, "logprobs": logprobs,
                  "n": n, "stop": stop, "error": error}))
PYTHON

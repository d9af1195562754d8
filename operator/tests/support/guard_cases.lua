-- Runs the gate's filter over bodies in all pieces of two, and in pieces of one byte. Loaded by haproxy -c, whose Lua it needs.
-- The environment names the files: GUARD, CASES (path, vocabulary, adapters and body in hexadecimal, a line each), RESULTS (the answers, a
-- line for each body).
local class
filter = { FLT_CFG_FL_HTX = 0 }
core.register_filter = function(_, given) class = given end
dofile(os.getenv("GUARD"))

local function answer(path, vocabulary, adapters, pieces)
  local refused
  local txn = {
    sf = { path = function() return path end },
    get_var = function(_, name) return name == "txn.adapters" and adapters or vocabulary end,
    set_var = function(_, name, value)
      if name == "txn.refused" then refused = value end
    end,
  }
  local guard, passed = class:new(), {}
  local headers = { is_resp = function() return false end }
  guard:http_headers(txn, headers)
  for _, piece in ipairs(pieces) do
    local out = piece
    guard:http_payload(txn, { body = function() return piece end, set = function(_, text) out = text end })
    passed[#passed + 1] = out
  end
  return refused or "", table.concat(passed)
end

local out = io.open(os.getenv("RESULTS"), "w")
for line in io.lines(os.getenv("CASES")) do
  local path, vocabulary, adapters, body = line:match("^(%S+) (%S+) (%S+) (%x*)$")
  body = body:gsub("%x%x", function(byte) return string.char(tonumber(byte, 16)) end)
  local found, passed = answer(path, vocabulary, adapters, { body })
  local splits = { {} }
  for at = 1, #body do
    splits[1][at] = body:sub(at, at)
    splits[#splits + 1] = { body:sub(1, at), body:sub(at + 1) }
  end
  local same = true
  for _, pieces in ipairs(splits) do
    local again, spoiled = answer(path, vocabulary, adapters, pieces)
    same = same and again == found and (found == "") == (spoiled == body)
  end
  out:write(tostring(same), "\t", found, "\n")
end
out:close()

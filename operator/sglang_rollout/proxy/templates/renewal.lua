-- Serves a renewed certificate without a restart: established connections keep the old one, and new connections get the new one.
-- The kubelet replaces the files one after the other, so that they may not belong together for a moment. haproxy refuses such a pair.

local PERIOD_MS = 5000

local function read(path)
  local file = io.open(path, "r")
  if file == nil then
    return ""
  end
  local text = file:read("a")
  file:close()
  return text or ""
end

-- An empty line ends the argument of a command on the socket.
local function read_pair()
  local text = read(FILE) .. "\n" .. read(FILE .. ".key") .. "\n"
  return (text:gsub("\r", ""):gsub("\n+", "\n"))
end

local function command(text)
  local connection = core.tcp()
  connection:settimeout(5)
  if not connection:connect(SOCKET) then
    return "the socket does not answer"
  end
  connection:send(text)
  local answer = connection:receive("*a") or ""
  connection:close()
  return answer
end

local function renew(pair)
  command("set ssl cert " .. FILE .. " <<\n" .. pair .. "\n")
  local answer = command("commit ssl cert " .. FILE .. "\n")
  if answer:find("Success", 1, true) then
    return true, ""
  end
  command("abort ssl cert " .. FILE .. "\n")
  return false, answer:gsub("%s+", " ")
end

-- Read before haproxy reads the files: a change between the two is served once more.
local served = read_pair()

core.register_task(function()
  local refused
  while true do
    core.msleep(PERIOD_MS)
    local pair = read_pair()
    if pair ~= served then
      local done, answer = renew(pair)
      if done then
        served, refused = pair, nil
        core.Info("the renewed certificate is served")
      elseif pair ~= refused then
        refused = pair
        core.Warning("the changed certificate cannot be served, and the earlier one stays: " .. answer)
      end
    end
  end
end)

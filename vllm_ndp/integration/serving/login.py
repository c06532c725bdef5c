"""Page for a browser that comes without the server's key: a form asks for the key, and then opens the live page."""

LOGIN = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>vllm-ndp</title></head>
<body style="font:15px system-ui;margin:40px"><form><label>This server wants its API key:
<input type="password" name="key" autofocus></label> <button>Open</button></form><p id="said"></p><script>
async function open(key) {
  const answer = await fetch(location.pathname, {headers: {Authorization: 'Bearer ' + key}});
  if (!answer.ok) { document.getElementById('said').textContent = 'It says: ' + answer.status; return; }
  const page = await answer.text();
  window.ndpKey = key;
  history.replaceState(null, '', location.pathname);
  document.open(); document.write(page); document.close();
}
document.forms[0].onsubmit = event => { event.preventDefault(); open(document.forms[0].key.value); };
if (location.hash.length > 1) open(decodeURIComponent(location.hash.slice(1)));
</script></body></html>
"""
"""Without the key: a form. `/v1/ndp/#KEY` fills it in; what follows the # never leaves the browser by itself."""
